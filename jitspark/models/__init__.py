"""The classes that take the models' places in vLLM. They import vLLM and torch; nothing else of jitspark does."""
