"""What a run on a mesh needs and takes, without a device of it: bytes, communication, FLOPs, time."""
