"""What leaves the program: a policy as one file with its card, and the replay as data sets."""
