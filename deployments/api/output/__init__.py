"""Tools and reasoning: the formats in which models write tool calls and reasoning, and the parsing
of answers."""
