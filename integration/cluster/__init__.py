"""Two machines made of this one: namespaces with a network, an IPC and a host name of their own."""
