"""The data-plane contract on TransferQueue over Ray."""
