"""How losses become learning: updates, targets, scales, statistics, and their parts."""
