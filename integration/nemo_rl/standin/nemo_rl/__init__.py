"""Stand-in for NeMo-RL, which is on no index; see `integration/nemo_rl/test_nemo_rl.py`."""
