"""The replay-equivalence kit, which ``graphkit.testing`` makes public."""
