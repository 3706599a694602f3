"""The classes that take the models' places in vLLM, and what its worker brings. They import vLLM and torch."""
