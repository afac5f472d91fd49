"""Reading, comparing and plotting runs. PyTorch is not imported."""
