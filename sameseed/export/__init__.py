"""Other engines: what they are told, so that they do what sameseed was asked for."""
