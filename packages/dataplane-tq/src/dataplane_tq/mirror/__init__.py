"""The mirror: reports the directory's rows to TransferQueue's controller."""
