"""Other engines: what they are told, so that they do what foretoken was asked for."""
