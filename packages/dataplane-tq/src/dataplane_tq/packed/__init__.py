"""The memory layer of the `packed` backend: one flat buffer per field and put, in shared memory."""
