"""Reading runs, comparing them, and drawing what they are. PyTorch is not imported."""
