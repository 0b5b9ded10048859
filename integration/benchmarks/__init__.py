"""How fast the data plane on TransferQueue is, as ratios against other ways in the same run."""
