"""Pipeline (inter-layer) parallelism: schedules as tables, the layers' placement on stages, one executor for any
table."""
