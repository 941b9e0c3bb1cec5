"""FlexDeMo: nodes send each other only the fast-moving components of their momenta."""
