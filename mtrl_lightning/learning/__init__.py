"""How losses become learning: updates, targets, scales, statistics, and what they are made of."""
