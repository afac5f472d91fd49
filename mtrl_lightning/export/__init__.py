"""What leaves the program: a policy, and the replay as data sets."""
