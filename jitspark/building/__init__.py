"""The policy around the compiler: find what is wanted, compile what is missing once for the node, load it."""
