"""What several rooms use and none owns: counts, devices, text, progress bars."""
