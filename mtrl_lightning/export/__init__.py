"""What leaves the program: a policy as one file, and the replay as data sets."""
