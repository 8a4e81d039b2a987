"""Pipeline (inter-layer) parallelism: schedules as tables, the placement of layers on stages, and one executor for all
schedules."""
