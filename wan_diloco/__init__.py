"""Train one model across regions joined by ordinary wide-area links."""
