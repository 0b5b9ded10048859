"""Adapters that record steps and metrics of other trainers, and operations of TransferQueue.

The adapter ``trl`` imports its library at once, ``skyrl`` when used. ``verl`` and
``transfer_queue`` import no library: they act once the program imports it. The rest of the package
imports no adapter.
"""
