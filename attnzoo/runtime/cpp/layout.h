// Describe the functions and structures that Python also declares, so that it can compare them.
//
// A structure lists its fields once more, in the order of their declaration:
//     struct Task { int64_t size; const float* x;  FIELDS(size, x) };
// and a source file lists the functions that Python calls:
//     CALLED_FROM_PYTHON(forward, backward)
// Their arguments are pointers to such structures. The library then exports attnzoo_layout(), whose
// text layout.py compares with that of the ctypes classes when it loads the library:
//     function forward void
//     size 0 int64
//     x 8 pointer
//     sizeof 16
// The lines of a structure inside another, or behind a pointer, follow that of the field. A field
// that FIELDS lacks shows in the offsets or in sizeof, because structures have no padding.
//
// Fields are data and the text is formatted by one function that is no template, because kernels
// are compiled at the first call: code per field would take seconds.

#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <type_traits>
#include <utility>

#define FIELDS(...)                          \
    template <class Visitor>                 \
    void visit_fields(Visitor visit) const { \
        visit(#__VA_ARGS__, __VA_ARGS__);    \
    }

#define CALLED_FROM_PYTHON(...)                                \
    extern "C" const char* attnzoo_layout() {                  \
        static const Layout layout(#__VA_ARGS__, __VA_ARGS__); \
        return layout.text();                                  \
    }

template <class T, class = void>
struct HasFields : std::false_type {};
template <class T>
struct HasFields<T, std::void_t<decltype(std::declval<const T&>().visit_fields(0))>>
    : std::true_type {};

class Layout {
    struct Field {
        size_t offset;
        const char* kind;          // "int", "uint", "float", "pointer" or "struct"
        size_t bits;               // of an element
        size_t count;              // elements of an array; 0: not an array
        void (Layout::*inside)();  // adds the lines of a structure; or null
    };

    char text_[1 << 15];  // a longer text is cut, and then differs from Python's
    size_t size_ = 0;

  public:
    // Describe functions, whose names are given as "a, b".
    template <class... Functions>
    explicit Layout(const char* names, Functions*... functions) {
        (add_function(next_name(names), functions), ...);
    }

    const char* text() const { return text_; }

  private:
    struct Name {
        const char* begin;
        int size;
    };

    // Return the first of the names, and move on to the next.
    static Name next_name(const char*& names) {
        const char* begin = names;
        while (*names && *names != ',') ++names;
        const int size = int(names - begin);
        while (*names == ',' || *names == ' ') ++names;
        return {begin, size};
    }

    template <class Result, class... Structures>
    void add_function(Name name, Result (*)(const Structures*...)) {
        add("function %.*s ", name.size, name.begin);
        if constexpr (std::is_void_v<Result>)
            add("void\n");
        else
            add("%s%zu\n", kind<Result>(), 8 * sizeof(Result));
        (add_structure<Structures>(), ...);
    }

    template <class T>
    void add_structure() {
        static_assert(HasFields<T>::value, "arguments are pointers to structures with FIELDS");
        const T object{};
        object.visit_fields([&](const char* names, const auto&... x) {
            const Field fields[] = {field(&object, x)...};
            add_fields(names, fields, sizeof...(x), sizeof(T));
        });
    }

    template <class T>
    static Field field(const void* object, const T& x) {
        using Element = std::remove_extent_t<T>;
        using Target = std::remove_cv_t<std::remove_pointer_t<Element>>;
        Field field{};
        field.offset = reinterpret_cast<const char*>(&x) - static_cast<const char*>(object);
        field.kind = kind<Element>();
        field.bits = 8 * sizeof(Element);
        field.count = std::extent_v<T>;
        if constexpr (HasFields<Target>::value) field.inside = &Layout::add_structure<Target>;
        return field;
    }

    template <class T>
    static const char* kind() {
        static_assert(HasFields<T>::value || std::is_arithmetic_v<T> || std::is_pointer_v<T>,
                      "fields are numbers, pointers, arrays of these, or structures with FIELDS");
        return HasFields<T>::value           ? "struct"
               : std::is_pointer_v<T>        ? "pointer"
               : std::is_floating_point_v<T> ? "float"
               : std::is_signed_v<T>         ? "int"
                                             : "uint";
    }

    void add_fields(const char* names, const Field* fields, size_t count, size_t size) {
        for (const Field* x = fields; x < fields + count; ++x) {
            const Name name = next_name(names);
            add("%.*s %zu %s%zu", name.size, name.begin, x->offset, x->kind, x->bits);
            if (x->count) add("[%zu]", x->count);
            add("\n");
            if (x->inside) (this->*x->inside)();
        }
        add("sizeof %zu\n", size);
    }

    void add(const char* format, ...) {
        std::va_list values;
        va_start(values, format);
        const int size = std::vsnprintf(text_ + size_, sizeof text_ - size_, format, values);
        va_end(values);
        if (size > 0) size_ = size_ + size < sizeof text_ ? size_ + size : sizeof text_ - 1;
    }
};
