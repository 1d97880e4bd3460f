package deadlock

import (
	"fmt"
	"strings"
	"unicode"
)

// fewKeys are named in a session's box.
const fewKeys = 3

// box is what a drawing says about a session, in lines.
func (s *Snapshot) box(x Session) []string {
	lines := []string{fmt.Sprintf("session %d", x.ID)}
	if x.Application != "" {
		lines = append(lines, printable(x.Application))
	}
	if details := s.details(x); details != "" {
		lines = append(lines, details)
	}
	if x.Statement != "" {
		lines = append(lines, oneLine(x.Statement))
	}
	for _, l := range s.alone() {
		if l.Session == x.ID {
			lines = append(lines, "waits for "+label(l.Target))
		}
	}
	var held []string
	for _, l := range s.Locks {
		if l.Session == x.ID && !l.Waiting {
			held = append(held, "holds "+label(l.Target))
		}
	}
	return append(lines, few(held, fewKeys)...)
}

// nodeName is a session's name in a drawing.
func nodeName(id int64) string {
	return strings.Replace(fmt.Sprintf("s%d", id), "-", "m", 1)
}

// DOT is the graph in the language of Graphviz
// (https://graphviz.org/doc/info/lang.html): arrows from waiters to blockers, those
// of deadlocks red, and root blockers with a thick border.
func (s *Snapshot) DOT() string {
	var b strings.Builder
	b.WriteString("digraph locks {\n\trankdir=LR;\n\tnode [shape=box];\n")
	roots, cycles := s.isRoot(), s.inCycles()
	for _, x := range s.Sessions {
		style := ""
		switch {
		case cycles[x.ID]:
			style = ", color=red"
		case roots[x.ID]:
			style = ", penwidth=3"
		}
		fmt.Fprintf(&b, "\t%s [label=%s%s];\n", nodeName(x.ID), quoteDOT(s.box(x)...), style)
	}
	cyclic := s.cyclic()
	for _, w := range s.Waits {
		style := ""
		if cyclic[waitEdge{w.Waiter, w.Blocker}] {
			style = ", color=red"
		}
		fmt.Fprintf(&b, "\t%s -> %s [label=%s%s];\n", nodeName(w.Waiter), nodeName(w.Blocker), quoteDOT(label(w.Target)), style)
	}
	for _, g := range s.Gaps {
		fmt.Fprintf(&b, "\t// not seen: %s → %s\n", printable(g.What), printable(g.Remedy))
	}
	b.WriteString("}\n")
	return b.String()
}

// quoteDOT: a backslash would begin an escape sequence of labels.
func quoteDOT(lines ...string) string {
	text := strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(strings.Join(lines, "\n"))
	return `"` + strings.ReplaceAll(text, "\n", `\n`) + `"`
}

// Mermaid is the graph as a flowchart (https://mermaid.js.org/syntax/flowchart.html),
// as Markdown on many sites shows it: arrows from waiters to blockers, those of
// deadlocks red, and root blockers with a thick border.
func (s *Snapshot) Mermaid() string {
	var b strings.Builder
	b.WriteString("flowchart LR\n")
	roots, cycles := s.isRoot(), s.inCycles()
	for _, x := range s.Sessions {
		class := ""
		switch {
		case cycles[x.ID]:
			class = ":::deadlock"
		case roots[x.ID]:
			class = ":::root"
		}
		fmt.Fprintf(&b, "\t%s[%s]%s\n", nodeName(x.ID), quoteMermaid(s.box(x)...), class)
	}
	cyclic := s.cyclic()
	for i, w := range s.Waits {
		fmt.Fprintf(&b, "\t%s -->|%s| %s\n", nodeName(w.Waiter), quoteMermaid(label(w.Target)), nodeName(w.Blocker))
		if cyclic[waitEdge{w.Waiter, w.Blocker}] {
			fmt.Fprintf(&b, "\tlinkStyle %d stroke:red\n", i)
		}
	}
	b.WriteString("\tclassDef deadlock stroke:red\n\tclassDef root stroke-width:3px\n")
	for _, g := range s.Gaps {
		// Nothing but a line's end ends a comment.
		fmt.Fprintf(&b, "\t%%%% not seen: %s → %s\n", mermaidComment.Replace(printable(g.What)), mermaidComment.Replace(printable(g.Remedy)))
	}
	return b.String()
}

// mermaidComment keeps a comment from being read as a directive.
var mermaidComment = strings.NewReplacer("{", "(", "}", ")")

// quoteMermaid writes all but letters, digits and the most harmless signs as
// numbers: https://mermaid.js.org/syntax/flowchart.html#entity-codes-to-escape-characters.
func quoteMermaid(lines ...string) string {
	var b strings.Builder
	b.WriteByte('"')
	for i, line := range lines {
		if i > 0 {
			b.WriteString("<br/>")
		}
		for _, r := range line {
			if unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune(" .,:/_-=?()", r) {
				b.WriteRune(r)
			} else {
				fmt.Fprintf(&b, "#%d;", r)
			}
		}
	}
	b.WriteByte('"')
	return b.String()
}

func (s *Snapshot) isRoot() map[int64]bool {
	ids := map[int64]bool{}
	for _, id := range s.Roots {
		ids[id] = true
	}
	return ids
}
