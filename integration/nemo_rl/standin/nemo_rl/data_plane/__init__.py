"""Data plane with the names and signatures of NeMo-RL's public reference."""
