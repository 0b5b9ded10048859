"""Planning: which bytes of which source go to which place in a receiver's scratch buffer."""
