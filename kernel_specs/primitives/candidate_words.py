"""How a candidate for the next token is laid out in a 64-bit word. Imports nothing: specs and kernels share it."""

TOKEN_BITS = 18  # the token id
EPOCH_BITS = 14  # above it; the value's 32 bits come above that
