"""New weights from trainers to generators: layouts and slices."""
