"""A configuration on a mesh: its state, where the state is placed, and the compiled programs that use it."""
