"""Files of tokenizers: what they hold, read without a tokenizer's library, and as a tokenizer.json. Torch-free."""
