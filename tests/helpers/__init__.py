"""What several test modules use: fakes, small algorithms and networks, runs, comparisons."""
