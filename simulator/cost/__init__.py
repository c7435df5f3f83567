"""Cost model: from Traffic and token counts to milliseconds, each with the source that it rests on."""
