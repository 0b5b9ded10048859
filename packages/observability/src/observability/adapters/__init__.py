"""Adapters that record steps and metrics of other trainers, and operations of TransferQueue.

The adapter ``trl`` imports its library at once; ``verl`` and ``skyrl`` import theirs when used.
``transfer_queue`` imports no library: it acts once the program imports TransferQueue. The rest of
the package imports no adapter.
"""
