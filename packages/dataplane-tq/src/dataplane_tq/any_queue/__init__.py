"""Inspection of a TransferQueue that any program started, without a change to that program."""
