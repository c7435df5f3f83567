"""The bundled tiny MoE model: its text, its network, its training and the trace recorded from it."""
