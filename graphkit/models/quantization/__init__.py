"""Linear layers and experts with weights of eight and four bits, and folders that have them."""
