"""The benchmarks: their tasks, and how an environment of each is made."""
