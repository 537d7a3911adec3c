"""Data, models and measurements that demo, compare, tasks, training and benchmarks share."""
