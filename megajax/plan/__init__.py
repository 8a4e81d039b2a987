"""Estimate what a run on a mesh needs, without the hardware: memory, communication, FLOPs, time."""
