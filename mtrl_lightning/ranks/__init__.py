"""Several processes that train one run."""
