"""The partition directory: each sample's fields, claims and storage location."""
