"""Adapters that record steps and metrics of other trainers, and operations of TransferQueue.

The adapter ``trl`` imports its library at once, ``verl`` and ``skyrl`` when they are used, and
``transfer_queue`` never: it waits until the program imports TransferQueue. The rest of the package
imports no adapter.
"""
