"""A configuration on a mesh: the state, where it lies, and the compiled programs over it."""
