"""Adapters that record steps and metrics of other trainers, and operations of TransferQueue.

Each adapter imports the library that it is named after. The rest of the package imports no adapter.
"""
