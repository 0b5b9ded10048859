"""Which bytes of which source go where in a receiver's scratch buffer."""
