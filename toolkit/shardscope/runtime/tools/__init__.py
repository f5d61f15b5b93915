"""Tools that launch runs or ranks to answer a question: `check`, `doctor`, `reproduce`, and transport speeds."""
