"""What layers in eight bits return: a readable reference, and the right result with its error bound."""
