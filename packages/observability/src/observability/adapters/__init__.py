"""Adapters that show the runs of other trainers as steps.

Each module imports the trainer that it is named after. The rest of the package imports no adapter.
"""
