"""Two machines made of this one: namespaces with a separate network, IPC and host name."""
