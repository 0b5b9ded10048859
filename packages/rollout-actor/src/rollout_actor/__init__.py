"""Multi-turn rollouts that write their bulk straight into a data plane."""
