"""Adapters that record steps and metrics of other trainers, and operations of TransferQueue.

An adapter imports the library that it is named after at once (``trl``), when it is used (``verl``,
``skyrl``), or never (``transfer_queue``, which waits for the program to import it). The rest of the
package imports no adapter.
"""
