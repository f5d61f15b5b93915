"""What runs other runs to answer a question: `check`, `doctor`, `reproduce`, and the speeds of the transports."""
